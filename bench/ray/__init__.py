"""What a deployment over several hosts on Ray costs, and what its clients notice when parts of it die."""

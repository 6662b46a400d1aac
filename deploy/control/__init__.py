"""The controller: what is wanted of a running deployment, and the loop that makes it so."""

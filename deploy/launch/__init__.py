"""One deployment on this host, from its first process to its last: `epd-serve serve`."""

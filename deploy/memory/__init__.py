"""What stages need of devices and of shared memory, and what to change where it is too little."""

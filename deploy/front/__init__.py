"""The front doors of a deployment: proxy processes behind one socket, which end and start apart from all else."""

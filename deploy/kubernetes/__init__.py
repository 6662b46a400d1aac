"""A deployment on the pods of a Kubernetes cluster: which there are, what they lend, and how many there should be."""

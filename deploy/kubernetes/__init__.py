"""A deployment on the pods of a Kubernetes cluster: its manifests, which pods there are, what they lend, and how many
there should be."""

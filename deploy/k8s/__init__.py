"""A cluster as manifests of Kubernetes: what runs in which pod, and how pods find each other."""

"""All roles of a cluster as the children of one process on one host: `tenuto up`."""

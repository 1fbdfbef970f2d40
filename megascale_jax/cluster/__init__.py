"""A run that does not stop: the driver of a job, the executors of its nodes, and what they need. No JAX anywhere."""

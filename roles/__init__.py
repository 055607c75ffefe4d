"""Who is running: frontend, scheduler, node agent, worker, simulator, and the `tenuto` command."""

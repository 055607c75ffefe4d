"""What an operator sees of a running cluster: dashboards and alarms, why a request was late, why a model misses its SLO."""

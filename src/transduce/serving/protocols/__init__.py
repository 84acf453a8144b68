"""The protocols that the service speaks, one module each: requests in, `Service` calls, responses out."""

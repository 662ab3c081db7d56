"""Programs that turn runs and measurements into the tables and figures of the paper."""

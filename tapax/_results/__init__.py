"""Results: what a capture returns, and the tables that results print as."""

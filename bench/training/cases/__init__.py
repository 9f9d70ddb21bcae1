"""What is measured: one module for each table."""

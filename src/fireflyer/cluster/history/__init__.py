"""The SQL history of the platform: tables, their migrations, the copier, and queries."""

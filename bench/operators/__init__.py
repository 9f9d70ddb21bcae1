"""What looking after nodes costs."""

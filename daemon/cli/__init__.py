"""What a person types: one module for each command, imported only when it is named."""

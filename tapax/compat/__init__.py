"""Drop-ins for the functions of other libraries."""

"""What plans are compared with: tracked, counted and public figures."""

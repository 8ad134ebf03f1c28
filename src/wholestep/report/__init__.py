"""Values as tables and pages for people to read."""

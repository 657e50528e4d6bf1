"""The report of a study: one HTML file with its pictures, its tables and the command behind every number."""

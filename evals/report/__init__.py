"""Write the results of a run: a table in the terminal, a JSON document, one self-contained HTML page."""

"""Declare and answer the routes of the API, one folder for each surface."""

"""Every tolerance of the suite, with its reason. Each has a power test beside its use: a comparison that must fail.

Tests import from here; a number in a test body is a defect.
"""

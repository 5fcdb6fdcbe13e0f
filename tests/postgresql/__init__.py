"""PostgreSQL as the database of tests: it is emptied after each test by DELETE."""

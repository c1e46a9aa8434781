"""Mutation testing: small changes of `segapp/`, each of which some test ought to notice."""

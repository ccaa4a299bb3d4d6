"""The sources, and which duty (sampler process) runs each. To add one: a file and a line here."""

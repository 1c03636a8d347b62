"""Settings: their sections, their sources, and the page that lists them."""

"""Train and measure the embedding of code search (`composer_nb/harness/search`)."""

"""Ready-made Spark jobs. ``registry`` lists them."""

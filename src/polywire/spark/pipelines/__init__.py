"""Ready-made Spark jobs, each a small readable function. ``registry`` lists them."""

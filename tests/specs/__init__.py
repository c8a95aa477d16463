"""What the published pages of the wires say, statement by statement, each test named after one."""

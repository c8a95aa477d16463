"""What tests of Polywire, and of programs that use it, run on: a broker in memory, a clock and a loop under control."""

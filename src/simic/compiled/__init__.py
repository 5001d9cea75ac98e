"""What is compiled for the CPU by numba: how, the functions that all of it shares, and the steps of an LSTM."""

"""Hosts on the CPU as programs that one compiled function interprets, host by host."""

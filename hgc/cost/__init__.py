"""What programs cost: symbolic expressions, compute, collectives, memory."""

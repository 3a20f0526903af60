"""The record of calls and its way back: variables, function nodes, primitives, backward passes."""

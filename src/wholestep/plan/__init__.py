"""TrainGraph, mesh and strategy -> Plan: the layout of every tensor."""

"""A state machine over broker, gate and rows: `model` says what must be, `stores` what is, `machine` tries both."""

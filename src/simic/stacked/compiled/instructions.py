"""The instructions of a program: operations, columns of a row, and values of columns."""

LINEAR, CONV, NORM, RELU, GELU, TANH, SIGMOID, PRODUCT = range(8)
SCALE, POOL, CHANNEL_SCALE, ADD, BLEND, SKIP, SKIPPED, CLEAR, EMBED, ATTEND, BATCH_NORM = range(8, 19)
OP, SRC, DST, AUX, UNIT, WEIGHT, BIAS, MODE, SLOT, TARGET, ROWS, SPACE, IN, OUT, GROUPS, GATE, MULTIPLY = range(17)
HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W = range(17, 27)
HEADS, CAUSAL, MEAN, VARIANCE = range(27, 31)
COLUMNS = 31
EPSILON, MOMENTUM = range(2)
"""Columns of the numbers of an instruction that are not whole."""
NOTHING, SET, ADD_TO = range(3)
"""Values of MODE."""
CROSS_ENTROPY, SQUARED_ERROR = range(2)
IGNORED = -100
"""Targets that a mean over samples leaves out, as in torch's cross entropy."""

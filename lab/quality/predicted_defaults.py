"""The settings that predicted blocks serve with, as the evaluations' commands give them: one source, the server's own.

The method `predicted` itself (`lab.methods.predicted`) begins with the paper's.
"""

from gpu.methods.predicted.settings import SERVED

HISTORY, SINK, WINDOW = SERVED["history"], SERVED["sink_tokens"], SERVED["local_tokens"]
EVERY, ROTATE = SERVED["predict_every"], SERVED["look_stride_blocks"]
UNREAD = "last"  # a block that is not read keeps what it had
NEVER = 1_000_000  # steps between calibrations of everything: a share is looked at in each step
CALIBRATE = SERVED["calibrate_every"] or NEVER
METHOD = (
    f"history={HISTORY},every={EVERY},rotate={ROTATE},calibrate={CALIBRATE},unread={UNREAD},sink={SINK},window={WINDOW}"
)

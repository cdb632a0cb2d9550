"""Every tolerance of the suite, with its reason. Each has a power test beside its use: a comparison that must fail.

Tests import from here; a number in a test body is a defect.
"""

# --- sampler ---
# Seeds are fixed, so these tests cannot flicker. A right sampler gives p-values spread evenly over [0, 1]: below 1e-3
# once in a thousand choices of seeds. A wrong setting must be seen beyond any doubt.
CHI_SQUARE_P = 1e-3
CHI_SQUARE_POWER_P = 1e-9
# Integer weights of 128K tokens: float32 rounding of each exp (6e-8, averages out), truncation 2**-45 a token. A
# sequential float32 sum rounds each of 128K equal steps the same way, and ends up off by more than FLOAT32_CDF_ERROR.
DRAW_CDF = 1e-7
FLOAT32_CDF_ERROR = 1e-4
# log_softmax in float32 of logits around 10: two roundings of a difference of size 16 or less, and the sum's.
LOGPROB_FLOAT32 = 1e-5

# --- gpu: positions, weights, attention of prefill, the runner ----------------------------------------------------------

# float32 powers and divisions, in another order than Hugging Face's: some units in the last place.
ROPE_FREQUENCY_RTOL = 2e-6
# An angle of 16,384 radians has float32 spacing 2e-3 / 2; frequencies that differ in the last place move it by as much.
ROPE_TABLE_ATOL = 4e-3
# float32 sums over up to 1,031 unit-variance terms, against float64.
ATTENTION_F32_ATOL = 2e-5
# Outputs of order one rounded to bf16 (8 bits: 2**-8 of values up to 2), and weights rounded to bf16 inside.
ATTENTION_BF16_ATOL = 1.6e-2
# Anonymous memory while loading, in copies of the float32 model: one, and allocator slack and one tensor in flight.
PEAK_HOST_COPIES = 1.2

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
# Flips between races of the same clocks under two distributions: below 2 / (1 + TV) of their total variation distance
# TV, by theory. An inverse CDF over V tokens with independent roundings flips about sqrt(V) times TV.
FLIPS_PER_TOTAL_VARIATION = 2.0
# log_softmax in float32 of logits around 10: two roundings of a difference of size 16 or less, and the sum's.
LOGPROB_FLOAT32 = 1e-5
# Of a real model of 30 layers, the largest difference of 2,000 log probabilities from float64: sums in float32, in any
# order. On a text of perplexity 55, 2.2e-5 was measured, and transformers in float32 is 2.7e-5 off; weights that are
# rounded to bf16 are 1e-1 off.
REAL_MODEL_LOGPROB_ATOL = 3e-5

# Activations rounded to 16 bits. Of one product: half a step of a unit, 2**-16 of its largest number, and float32
# roundings of the step, of its inverse and of the code (32,767 times 2**-22 of a step in all); and of sums at most
# `columns / 8 + 8` roundings of 2**-24 of what is added up, by the columns, of which there are 32 or more.
INTEGERS_HALF_STEP = 0.51
INTEGERS_SUMS = (1 / 8 + 8 / 32) * 2.0**-24
# The largest error of logits of three layers by their spread: 13 products, each off by 2.5e-5 of its norm, and small
# inputs that norms make large (1.1e-3 seen).
INTEGERS_LOGITS = 3e-3
# Of a real model beside activations as they are: next-token KL in the mean, perplexity relatively, and what two best
# log probabilities may differ by where a greedy text parts. As asked for; far less is seen (docs/PERFORMANCE.md).
INTEGERS_KL = 1e-3
INTEGERS_PERPLEXITY = 5e-3
INTEGERS_PARTING = 0.05

# --- gpu: positions, weights, attention of prefill, the runner -------------------------------------------------

# float32 powers and divisions, in another order than Hugging Face's: some units in the last place.
ROPE_FREQUENCY_RTOL = 2e-6
# An angle of 16,384 radians has float32 spacing 2e-3 / 2; frequencies that differ in the last place move it by as much.
ROPE_TABLE_ATOL = 4e-3
# float32 sums over up to 1,031 unit-variance terms, against float64.
ATTENTION_F32_ATOL = 2e-5
# Outputs of order one rounded to bf16 (8 bits: 2**-8 of values up to 2), and weights rounded to bf16 inside.
ATTENTION_BF16_ATOL = 1.6e-2
# int8 rows, and queries and weights as integers of 16 bits. An element of a query is off by 0.29 / 32,512 of the
# largest on average, 3 of a unit: 2.7e-5, and a logit by as much of its spread of 2; weights of 32 cells likewise.
INTEGER_PRODUCTS = 3e-4
# One element that is 100 units rounds all the others to 100 / 65,024 at most, and logits of 20 units are off by more.
INTEGER_PRODUCTS_OF_OUTLIERS = 3e-3
# A logit of a query whose largest is 120 units is off by 0.29 / 32,512 of that for each unit of a key of 128: 1.1e-3 on
# average. With 8 bits of the query it would be 256 times as much.
INTEGER_LSE_OF_OUTLIERS = 5e-3
# Anonymous memory while loading, in copies of the float32 model: one, and allocator slack and one tensor in flight.
PEAK_HOST_COPIES = 1.2

# Rows in codes of 8 bits. The largest error of an element in steps between neighbours, a half, and float32 roundings of
# the scale and of the quotient, 127 times 2**-23 of a step of int8; e4m3 has at most 16 steps to a power of two.
KV_INT8_STEP = 0.5 + 2e-5
KV_FP8_STEP = 0.5 + 2e-6
# Of normal rows of 128 elements, relative in norm: a step of int8 is a 46th of the standard deviation (the largest of
# 128 is 2.7 of these), its error that over sqrt(12), 0.0063; e4m3 has 3 bits of mantissa, 2**-4 / sqrt(3) / 1.4, 0.026.
KV_ROW_INT8 = 0.009
KV_ROW_FP8 = 0.035
# A scale is a float32 quotient, and a row its product with a code: two roundings of 6e-8.
KV_SCALE_FLOAT32 = 2.5e-7
# A number in bf16: half of 2**-7 of it, and float32 roundings on the way.
ROUNDING_BFLOAT16 = 2.0**-8 + 1e-6

# Logits of four layers of the reference model over rows in codes, against an oracle whose rows are what codes mean:
# sums in another order move a few elements of thousands over the border between two codes of int8 (0.004 seen).
KV_FLIP_LOGITS = 0.012
# The same where rows are made codes of twice, or prompts are computed without: seen 0.006 and 0.036. Without codes in
# the oracle 0.05 and 0.22 (the power test).
KV_ROUNDED_AGAIN_LOGITS = {"int8": 0.02, "fp8": 0.08}

# --- bench: the load-test client ---
# Latencies of a hand-written trace, in ms: float64 seconds to ms, a few roundings of 1e-13 s.
LOAD_MS = 1e-6
# Mean gap of seeded arrivals against the asked one, in standard errors: one seed in 16,000 is further off.
LOAD_RATE_SIGMAS = 4.0
# Least p of a Kolmogorov-Smirnov test on 20,000 seeded gaps; the seeds are fixed, so it does not flicker.
LOAD_ARRIVAL_P = 1e-3
# Latency against a scripted delay, in seconds: loop timers of both sides and a busy machine; never early but by a
# timer's resolution.
LOAD_LATE_S = 0.25
LOAD_EARLY_S = 0.005
# Tokens of a prompt cut by the tokenizer, and of the prefix two prompts share: a token at each seam may merge.
LOAD_CUT_TOKENS = 1
LOAD_SEAM_TOKENS = 2
# Share by which a prompt cut by a server's counts of 400-character pieces may miss: tokens are taken to be evenly long
# inside a piece.
LOAD_PIECE_SHARE = 0.03

# --- server ---
# Seconds from a client's disconnect to an idle engine: two messages, on a busy machine. Undone, they run on.
CANCEL_S = 3.0
# Seconds that an engine process may live on after the process that started it: it looks once a second.
ORPHAN_S = 5.0
# Seconds until an engine that falls silent is told where 0.8 are allowed: four looks, a busy machine.
QUIET_LATE_S = 5.0
# Seconds of a drain of 0.3: last words, the engine's end, a busy machine. Half a body alone would take 60.
DRAIN_LATE_S = 12.0
# Seconds for which a tokenizer on the event loop is seen to let nobody in; off it, it waits as long as others take.
LOOP_STALL_S = 0.5
# Seconds by which some hundred timers of a connection may be late on a busy machine; without them nothing ever closed.
DEADLINE_LATE_S = 5.0
# Bytes of a flood of headers, of which five may take no third in memory: kept, each would take all of it.
HEADER_FLOOD_BYTES = 24 * 2**20
# Bytes of memory a character of texts that are refused: body and string, some 2; tokenised, a character takes 104.
REFUSED_TEXT_BYTES = 20
# Seconds that a chat waits longer beside 18 MB of them, on a busy machine; tokenised in its way, they took a minute.
REFUSED_TEXT_S = 8.0
# Seconds of its own work that the event loop stands still while a body of up to 15 MiB is decoded: 0.03 to 0.17;
# decoded in its way, those of the test took 1 to 35.
BODY_STALL_S = 0.7
# Seconds of 2,000 tokens' text against sixteen stop strings of a thousand characters: 0.03 to 0.3.
STOP_STRINGS_S = 1.0
# How many times as long the way takes in which every beginning is looked for, on the same machine: some 100.
STOP_STRINGS_GAIN = 10
# Comments in 1.1 s of silence at one in 0.2 s: five, and fewer where a busy machine runs the timers late.
KEEPALIVE_COMMENTS = range(3, 6)
# Reports in 1 s of prefill at one in 0.2 s; the engine tells fifty times.
PROGRESS_REPORTS = range(3, 7)

# --- end to end ---
# float32 logits of one context differ by batch shape in their last bits; only where the two best are this close may the
# greedy choice differ from the lone run's.
FLIP_LOGIT_GAP = 1e-3
# float32 logprobs over keys and values that only one of two runs has in bf16, in host memory: 2e-4 was seen. Rows of
# another layer for some that came back move one by 0.1 (a fault of tests/mutants).
PLACED_LOGPROB_ATOL = 1e-3
# A draw flips with less than twice the probability mass that float32 rounding moves (some 1e-6); top-p may move a token
# across its border: 1e-4 a token.
SAMPLED_FLIPS_PER_TOKEN = 1e-4
# Logits of 20 in bf16 are 1/8 apart and carry the rounding of twelve layers: a few of those.
BF16_FLIP_LOGIT_GAP = 0.5
# A first flip ends the comparison, so at most one a stream of 40 tokens; bf16 moves some percent of the mass.
BF16_SAMPLED_FLIPS_PER_TOKEN = 1 / 40
# Compiled decode step, in standard deviations of the logits: float32 sums of some hundred terms through two layers.
COMPILED_LOGITS_FLOAT32 = 3e-5
# The same over bf16 weights and pages, with float32 between: a key or value near the middle of two bf16 numbers may
# round the other way than float64's. That is rare (2 of 36 batches were over 5e-4), and counts most where a row attends
# to itself alone: 2**-8 of an element of its only value gave 4.7e-3 once. A lost token of 200 is 0.1.
COMPILED_LOGITS_BFLOAT16 = 1e-2
# The same over rows in int8: an element of the step's own key or value near the middle of two codes may round the other
# way, a 127th of the row's largest, and counts most where a row attends to itself alone.
COMPILED_LOGITS_INT8 = 1e-2
# exp in float32, relative: two units in the last place.
EXP_FLOAT32 = 2.4e-7
# Seconds between a stream's tokens while a 4K-token prompt is prefilled on one thread: what the server is asked to aim
# for; the mean keeps to it. A single step may take more (its cost is predicted), most of all on a machine that others
# load as well. Without interleaving, one gap would be all of the prefill: more than a third of it on any machine.
GAP_TARGET_S = 0.4
GAP_BOUND_S = 1.5
GAP_SHARE = 1 / 3
# Share of a 12K-token prefill that may pass while a prompt of 500 tokens gets its first token: two units are 1/36 (of
# 6 chunks in 12 layers), and progress is told twice a second. Served in order of arrival, all of it would pass.
PASSED_SHARE = 0.1
# Memory of the API process under hostile clients: bodies of 2 to 16 MB, their strings and lists, and texts that are
# being counted. Without limits, six of the texts alone took it beyond 3 GiB.
HOSTILE_PEAK_BYTES = 768 * 2**20
# The highest of a soak's last third over the highest of the third before: one more body or two at the same time.
HOSTILE_GROWTH_BYTES = 96 * 2**20
# Seconds of the 99th percentile of gaps at 20 ms a token where client, server and attackers share two busy cores;
# with a text tokenised on the event loop, or headers kept, streams stand still for longer.
HOSTILE_SAMPLE_GAP_S = 1.0
# Log-probabilities of twelve float32 layers against Hugging Face's, up to 8K tokens: sums in another order.
PROMPT_LOGPROB_ATOL = 1e-4
# Share of positions at which the second-best token is further than that below the best: its choice would be seen.
SECOND_BEST_SEEN = 0.99
# The same weights and the same kernels, cut into other chunks: float32 sums in another order.
CHUNKING_LOGPROB_ATOL = 1e-4
# Logits of four float32 layers whose attention is merged from the device's part and the host's: sums in another
# order, logits of some ten units.
HOP_LOGITS_FLOAT32 = 2e-4
# The same where every key is sampled (1 bit, 64 tables): keys almost opposite to the query may be missed or weigh twice
# as much, and have next to no weight.
HOP_LOGITS_ALL_SAMPLED = 5e-3
# A mean that another program summed in another order, in float64.
HARNESS_METRIC_RTOL = 1e-12
# bf16: share of positions whose most likely token is float32's, below transformers' own share, at most.
BF16_AGREEMENT_LOSS = 0.003
# bf16 logprobs, decoded against prefilled: of the order of the logits' own rounding (spacing 2**-4 at 16).
BF16_LOGPROB_ATOL = 0.25

# Relative norm of a kernel's float32 result against float64: a few ulps (6e-8), grown by sums of some thousand terms.
KERNEL_FLOAT32 = 3e-6
# The same of a bf16 result: one rounding to nearest is 1.7e-3, two in a row 2.4e-3; Triton's interpreter truncates.
KERNEL_BFLOAT16 = 7e-3
# The same where norm, product and SwiGLU run one after another on the CPU: five roundings in a row over few outputs.
# The kernels round three times to nearest: 2.5e-3 to 7.8e-3. Not for three that the interpreter cuts, all towards 0.
KERNEL_CHAIN_BFLOAT16 = 1.5e-2
# The same of a reference run in float64.
KERNEL_FLOAT64 = 1e-12
# Logits: float32 sums of a thousand products on tensor cores, which truncate; rounded to bf16 they are off by 1.7e-3.
LOGITS_FLOAT32 = 3e-5
# Logits where rotation factors stand in a file as float32: frequencies differ by a last place, angles of 150 positions
# by 2e-5, queries and keys have a length of ten.
GGUF_ROPE_LOGITS = 2e-4
# Standard deviation and mean of 2.6e5 drawn numbers around 0.1: 1e-4 of chance, and rounding to steps of a third of it.
SPREAD_OF_DRAWN = 5e-3
# Natural-log lse, absolute: float32 logits of a few units.
LSE_FLOAT32 = 5e-6
# The same for each unit of |lse| sqrt(dim), where that is more: from an lse of 5 on at 256 dims, of 10 at 64. A logit
# is a float32 sum of dim products, rounded at each by up to 2**-24 of what it has come to, up or down: so a root.
# Summed by numpy in the kernel's order, rows in codes are off by 0.16 of this (rms) and 0.6 at most.
LSE_DOT_FLOAT32 = 2.0**-24
# The same from bf16 queries and keys through torch's CPU attention, which scales the query in bf16 steps.
LSE_BFLOAT16 = 5e-4
# lse of flat logits against log(n), absolute: float32 rounding of a number below 16, over some merges.
LSE_CHECKSUM = 4e-6
# The same through torch's bf16 CPU attention, whose exp is approximate: masses come out 5.3e-5 low.
LSE_CHECKSUM_BFLOAT16 = 1e-4
# Float32 merges in another order or grouping: absolute for lse, and for outputs a unit of |lse|. A mass is exp(lse), so
# the half ulp that its lse is rounded by (6e-8 |lse|) moves an output of a few units, at each of up to seven merges.
MERGE_FLOAT32 = 5e-6

# --- benchmarks ---
# GB/s (or TFLOP/s) of any machine that this can run on: slower or faster is a unit mistaken by a thousand.
PLAUSIBLE_RATES_GB_S = (0.05, 20_000.0)
# Ratio of two timings of a matrix product on a machine that others use too: a unit mistaken by a thousand is beyond it.
MATMUL_RATE_SPREAD = 30.0

# Share by which a floor may differ from its bytes over its rate, both shown with two or three digits.
FLOOR_ROUNDING = 0.03
# By which a ratio with one digit after the point may differ from that of rounded figures: half a digit, and the same of
# the log's rounding of both. With two digits, a tenth of it.
RATIO_ROUNDING = 0.06

# --- evals ---
# Scores that the published packages round or divide with a guard of 1e-8.
SCORE_ROUNDING = 1e-6
# Share of a requested length that a generated prompt and its answer room must fill.
PROMPT_FILLED = 0.98
# Share of a document by which a sentence may miss the depth that is asked: half a sentence of text, and the inserts
# (some ten, in 2,000 tokens) that stand before it though depth counts text alone.
DEPTH_SHARE = 0.12
# Share of 8-word sequences of generated text that occur once in 100,000 words.
PROSE_DISTINCT = 0.97
# Coverage of a 95 % bootstrap interval over 600 simulated runs: two standard errors (0.009 each); the seed is fixed.
COVERAGE_95 = (0.93, 0.97)
# Least coverage of an exact interval, under any truth.
COVERAGE_EXACT = 0.95
# Most runs in which a true loss of x + 1 points may pass as "within x": losses' and gains' tails of 1.25 % each.
FALSE_VERDICTS = 0.025
# Points of a stored interval: JSON keeps float64 whole, so what is left is another order of a few roundings.
POINTS_STORED = 1e-6
# Probability of counts that a sum over losses and gains leaves out.
MASS_LEFT_OUT = 1e-9
# Least share of runs in which a method that loses one prompt of a thousand passes as "within 1" over 400 prompts.
VERDICT_POWER = 0.9

# --- attention methods of the evals ---
# Float32 attention over a few dozen keys against float64: outputs and lse of a few units.
METHOD_FLOAT32 = 5e-5
# A mean over independent draws against its expectation: beyond five standard errors once in a million.
SAMPLED_MEAN_SIGMAS = 5.0
# A probability in float64 against another form of it: its logarithm, absolute and relative.
INCLUSION_RTOL = 1e-8
# Shares of keys read against a table that is printed with one digit (0.5 %, 6 %) and comes from one model's keys.
TABLE_8_RTOL = 0.45
# Logits of twelve float32 layers against transformers: sums in another order, logits of some ten units.
FORWARD_LOGIT_ATOL = 5e-4

# --- training: the reference model ---
# float32 logits of order 0.2 through two implementations of the same layers, in another order.
TRAINING_LOGITS_ATOL = 1e-5
# Five Newton-Schulz iterations with Muon's coefficients leave singular values between about 0.7 and 1.2; bf16 adds 1 %.
MUON_SINGULAR_VALUES = (0.6, 1.3)

# --- rows in the host tier ---
# Steps of an int8 row's scale: rounding is half of one, and float32 quotients of up to 127 are off by 1e-5.
INT8_HALF_STEP = 0.5001
# Steps of a row's own scale: rounding is half of one. The format divides by the span plus 1e-8, which in rows around
# 1e-3 (a span of 4e-3) moves the last of 255 steps by 6e-4 of one.
FUSED_HALF_STEP = 0.501
# Of a row's largest element: what one rounding in place of two can change (Triton's interpreter rounds a product's sum
# twice), and in bf16, where a number between two others falls to the other.
FUSED_READ = {"float32": 2e-7, "bfloat16": 8e-3}
# Of each element of a chunk kept in bf16: half a unit of 8 significant bits, and the float32 that it came from.
CHUNK_BFLOAT16 = 2**-8 * 1.0001
# Share of codes that two orders of summation agree on: a product within some ulps of zero decides a bit of ten.
SAME_CODES = 0.999

# --- prefill of prompts that are offloaded to the host ---
# Error of a row kept in bf16, as a share of the layer's largest centred element: half a unit is 2**-8 of an element at
# the lower end of its binade, and keys are centred on their segment's mean, values not at all.
HOST_ROW_BFLOAT16 = 5e-3
# The same in int8: half a step of 1/127 of the largest element.
HOST_ROW_INT8 = 6e-3
# Logits of a few units in bf16, from the same chunks through the same kernels, elsewhere in memory: one unit above 4.
HOST_LOGIT_SAME_CHUNKS_ATOL = 3.2e-2
# The same where chunks are cut elsewhere and a prefix has been rounded once more; bf16 is off float32 by as much.
HOST_LOGIT_BFLOAT16_ATOL = 0.5

# --- cpu: the host tier ---
# float32 sums of some thousand rows over one to a dozen segments and their merges, against float64 over the same
# stored rows; with every key sampled, u is 1 to 1e-6. One row of 3,000 weighs a hundred times as much.
TIER_FLOAT32 = 2e-5
# The same where rows are int8: the query is rounded to 16 bits for integer products, which moves a logit by some 1e-4.
TIER_INT8 = 3e-4
# A drawn key's share of the mass, relative: exp and sums in float32, -log u off a table, come to 2e-6; and where rows
# are int8, the query's 16 bits, to 7e-5, and to 3.1e-4 for queries and keys of norm 16 (a GLM's, whose biases count). u
# of one bit or of one table more or less is off by percents at least.
SAMPLED_WEIGHT_BFLOAT16 = 2e-5
SAMPLED_WEIGHT_INT8 = 6e-4
# A drawn key's weight, relative: the kernel's and that of the evals' torch method, both of float32 products, are 4e-6
# apart.
SERVED_WEIGHT = 2e-5

# --- cpu: kernels of host attention ---
# Outputs of order one and lse below 30, in float32 against float64: dots of 128 products, softmax of some thousand
# rows, a table of weights whose interpolation is right to some 1e-6. The lightest row that a power test drops moves
# more.
HOST_ATTENTION_FLOAT32 = 1e-5
# The same over int8 rows: the query is rounded to 16 bits, half a step of 1/32767 of its largest element a product.
HOST_ATTENTION_INT8 = 2e-4
# Estimated errors of samples, relative: differences of float32 sums over groups of tables. The mask of another reading
# moves them by a tenth and more. Over int8 rows the direction is rounded like a query.
ESTIMATED_ERROR_RTOL = 1e-3
ESTIMATED_ERROR_INT8 = 5e-3
# Two numbers of threads: parts are cut and merged alike, so not a bit may differ.
HOST_THREADS = 0.0
# -log u between the table's borders against float64, for cosines above -0.5 and tables as they are used (u near 1 where
# the cosine's arc is steep), in nats; u's own float32 rounding is 4e-6 at 60 nats.
COLLISION_TABLE_NATS = 2e-4
# u in float64 against 250 digits, relative.
COLLISION_FLOAT64 = 1e-11
# Standard errors of a mean over independent projections: beyond five once in a million.
UNBIASED_SIGMAS = 5.0

# Fractions of integer counts: a few float64 roundings. One key in thousands is a relative 1e-4.
EXACT_FRACTION = 1e-12
# --- what the scheduler learns ---

COST_MODEL = 0.01  # of a unit's time, learnt from noise-free times of three terms: the mean context is half a token off
COST_MODEL_FIT = 1e-6  # of the norm of an error: least squares in float64, of terms that may say the same
# --- scheduler ---
# Of prefill's time, what the oldest prompt may lack of its share: one unit that it is yet to get, over a prefill of
# some thirty, and the error of the estimates that shares are counted in.
PREFILL_SHARE = 0.03
# CPU time of a plan while 200 prompts of 60,000 tokens wait, at the 99th percentile: the target, on an idle core.
PLANNING_MS = 1.0
# --- MOMO's prefill ---
# Outputs of order one and lse and scores below 30 in float32, queries of twice unit length: sums in another order.
MOMO_FLOAT32 = 3e-5
# Outputs where softmax weights are rounded to bf16 (2**-9 relative), against the float64 of the same bf16 numbers.
MOMO_BFLOAT16 = 2e-2
# --- MAC-Attention ---
# A head's output and a summary, relative norm, float32 sums and merges through chains of reuse, against float64.
MAC_FLOAT32 = 1e-5
# The same where keys, values and softmax weights are bf16 (2**-9 relative each).
MAC_BFLOAT16 = 1.2e-2
# lse of some hundred cells, absolute: float32; and where the rotated query is rounded on its way.
MAC_LSE_FLOAT32 = 1e-5
MAC_LSE_BFLOAT16 = 1e-3
# Squared distances of queries of 64 to 128 dims as |q|^2 + |p|^2 - 2 qp, in float32: some ulps of the norms.
MAC_DISTANCE2 = 2e-4
# One rounding of a summary to bf16; and what an output is off by whose summary was rounded a dozen times in a chain.
MAC_SUMMARY_BFLOAT16 = 2.0e-3
MAC_SUMMARIES_BFLOAT16 = 1.0e-2

# --- MAC --------------------------------------------------------------------------------------------------------------

# Queries of four float32 layers, rounded to bf16: a value next to a rounding border may go either way, an ulp apart.
MAC_QUERY_RTOL = 2.0**-7
# Summaries (out, lse) of the same query and rows by two kernels in float32: sums in another order, four layers deep.
MAC_SUMMARY_ATOL = 1e-3
# The same where one of them reads rows that host memory has in bf16: keys and values are off by 2^-9 of theirs.
MAC_SUMMARY_STORED_ATOL = 5e-2
# --- families ---
# Of the largest logit: float32 sums in another order than transformers', through a few layers; seen to 1e-5. One
# setting that is off by little (a window by one token, a base by a hundredth) gives more.
FAMILY_LOGITS = 1e-4
# Behind 3,000 tokens an angle in float32 is off by up to 1.2e-4. A gpt-oss is 1.4e-4 off transformers there, which is
# 1.3e-4 off itself with angles in float64, and we are 1.7e-4.
FAMILY_LOGITS_FAR = 2e-4
FAMILY_LOGITS_ON_CARDS = 1e-3  # other kernels for other parts of a sum, on a card
# Root mean square of differences of log-probabilities, in nats, by how the host keeps rows, as in `tandem bench long`;
# seen to 0.0012 and 0.0054. A KV head whose answers are wrong in one layer gives ten times as much and more.
FAMILY_OFFLOADED = {"bfloat16": 0.003, "int8": 0.01}

# --- the predictor of attention ---
# Scores of order one in float32: sums of 144 and of 64 * 32 * 9 terms of order one over the rows' number, and in steps
# a few hundred roundings of a running sum. The published module in float32 is as far off.
PREDICTOR_FLOAT32 = 1e-5
# Products of bf16 numbers (2**-9 relative each), averaged over a history, of scores of order one.
PREDICTOR_BFLOAT16 = 2e-2
# Likewise where blocks have the same in all rows of six to nine: their roundings are the same, too, and do not average.
# An H100 is off by 0.022 at most there.
PREDICTOR_BFLOAT16_ALIKE = 4e-2
# Attention whose logarithm is stored to eight codes an octave: half a code is 2**(1 / 16).
HISTORY_CODE_RTOL = 0.0443
# Attention of a few hundred keys in float32 against float64, values up to one.
HISTORY_FLOAT32 = 2e-6
# Codes of attention, eight an octave, whose logarithm two programs round: next to a border it may go either way.
HISTORY_CODE = 1

# --- fused prompts ---
# Logits of a fused prompt of a small model in float32 against float64, and rows of its chunks: sums of six layers; the
# policies, and a token more or less, move them by ten times that.
FUSED_LOGIT_ATOL = 2e-4
# Logits where chunks are kept in 8 or 16 bits: half a scale of rows that span several units, through six layers.
FUSED_ROWS_INT8_ATOL = 0.5
# Next-token KL of a prompt all of whose tokens are computed again from one in bf16 by other kernels, in nats: logits
# that bf16 rounds by a hundredth; a policy that leaves out anything that matters has ten times that.
FUSED_BFLOAT16_KL = 2e-2

# Of a vector's largest entry: prompts' vectors beside transformers', both float32, whose products add in other orders.
POOLED_ATOL = 1e-5

# Milliseconds of a placement by hand, as a share: both are quotients of the same whole numbers in float64. One token of
# a context of 98,304 more or less is a hundred thousandth.
PLACEMENT_MS = 1e-9

# Sums of 96 to 4,096 products in float32 of numbers that are exact, and twice so; relative to the largest of a result.
HOST_EXPERTS_FLOAT32 = 2e-5
# In integers activations have 16 bits, twice, before gate and up and before down: 1.3e-4 at most was found.
HOST_EXPERTS_INTEGERS = 3e-4
HOST_EXPERTS_SHARE = 1e-2  # what one expert of a row, or another row's share of it, changes at the least
# A token's sum over experts in two parts, relative to its largest: in float32 the order of a few terms; in bfloat16
# what the whole one is rounded by, and each expert's part, once.
FAR_SUM_FLOAT32 = 2e-6
FAR_SUM_BFLOAT16 = 2.0**-7
# A layer's output where the CPU computes some experts: one rounding to bfloat16 in place of the card's three or four.
COMPUTED_EXPERTS_BFLOAT16 = 2.0**-6

# --- gpu: indexed attention ---
# Of a partial over rows in float32, relative in norm: sums in another order, and products in TF32 on a card.
INDEXED_PARTIAL = 1e-3
# ... over rows, queries and weights in bf16.
INDEXED_PARTIAL_BFLOAT16 = 1e-2
# Estimated logits are stored in float16, as are rotated queries: 2**-11 of logits of a few, and of sums of 64 products.
INDEXED_SCORES = 4e-3
# Weights of rounded values are rounded to bf16: 2**-9 of each, at random.
INDEXED_WEIGHTS = 4e-3
# Logits of four layers of the reference model, of 300 tokens, with 22 read exactly of each 220: 0.5 was seen.
INDEXED_LOGITS = 2.0
# Error of a layer's attention there, 5 % of 800 tokens read: 0.06 was seen, and 0.13 without the estimate.
INDEXED_ERROR = 0.1
# Codes at the border of two, as a share for each step of the codes: keys and rotation are rounded to float16 on the
# way; 1.7e-4 was seen on a card.
INDEXED_FLIPS = 3e-4

# --- a model that is split over devices ---
# Logits in float32, of the largest: sums over columns in two parts, layer after layer. 2.2e-6 was seen.
SPLIT_LOGITS = 2e-5
# A partial of 45 rows of order one beside float64, with products and sums in float32.
CPU_ATTENTION_FLOAT32 = 1e-5

# Log probabilities of a prompt's tokens where FP8 matrices are multiplied by tokens in FP8, beside tokens as they are,
# on average over 300 tokens of a document. Measured: 0.056.
FP8_TOKENS_LOGPROB = 0.1

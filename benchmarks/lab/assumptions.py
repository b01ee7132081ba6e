"""Every constant of the simulation, with where it comes from.

"Measured" are figures of the 2-core AMD EPYC (Zen 5, AVX512-BF16) of which the docstrings of
``src/finecast`` and ``benchmarks/RESULTS-*.md`` tell; "recorded" are those of 41 recordings of
22 nets in OpenVINO and ONNX Runtime on a Xeon with AMX (``RESULTS-lab.md``), by the median
where a few values are far off; "assumed" are figures that nobody has measured yet.
``python -m benchmarks.lab fit`` prints what recordings say of them. A deviation is that of
the natural logarithm, if nothing else is said: 0.1 is ten percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from finecast.numbers.formats import Format

# ------------------------------------------------------------------------------- times of ops

PRODUCT_GFLOPS: Final = 120.0
"""fp32 products of this machine, two cores. Assumed; only ratios to the casts' time
matter."""

BANDWIDTH_GB_S: Final = 20.0
"""Memory that other ops move. Assumed."""

OP_S: Final = 4e-6
"""What a kernel takes beside its arithmetic. Assumed; ONNX Runtime's and OpenVINO's kernels
of small ops take 2 to 10 us."""

NET_SPEED_DEVIATION: Final = 0.3
"""How far the products of two nets are from the same rate. Assumed."""

SPEEDUPS: Final[Mapping[Format, tuple[float, float]]] = {
    Format.BF16: (2.2, 1.25),
    Format.FP16: (2.0, 1.2),
    Format.INT8: (3.0, 1.0),
}
"""How many times as fast products and other ops are in a format, in the middle. Measured:
RESULTS-hint.md (whole nets 1.2 to 2.5 in bf16), RESULTS-int8.md (int8 is 1.0 to 1.7 of
bf16)."""

SPEEDUP_DEVIATION: Final = 0.25
"""The deviation of a kernel family's speedup. Assumed, so that whole nets gain 1.1 to 2.4."""

KERNEL_SPEEDUP_DEVIATION: Final = 0.12
"""The deviation of one kernel's speedup from that of its family. Assumed."""

FAMILY_CORRECTION: Final = 0.16
"""Predicted over true time of a kernel family in a format: one factor for the whole family.
Recorded of 133 families."""

KERNEL_CORRECTION: Final = 0.10
"""The same of single kernels, beside their family's. Recorded of 1,381 kernels."""

PROFILE_NOISE: Final = 0.04
"""What two profiles of one kernel differ by. search.md: first trials differ between two runs
because kernel times do."""

CAST_DEVIATION: Final = 0.4
"""True over predicted time of a cast. search.md: casts cost kernels that the hint does not
have; some are fused and some are not. The size is assumed."""

FUSED_SHARE: Final = 0.15
"""The share of values whose maker and reader run faster if both have one format, as they are
then fused. No profile tells it. Assumed."""

FUSED_GAIN: Final = 0.5
"""What such a pair loses if formats differ, as a share of the maker's time. Assumed, of
reports of kernels that fall apart (engines/fallen_apart.py)."""

# ----------------------------------------------------------------------------- noise of races

PROCESS_DEVIATION: Final = 0.04
"""A model that is loaded anew takes another time, all along. search.md: one file in five
processes 1.83 to 2.09, up to 15%; with fp32's own that is .04 for each. Recorded: .055 of two
models together."""

PROCESS_LIMIT: Final = 0.15
"""The largest such factor, as search.md has it."""

ROUND_NOISE: Final = 0.03
"""The deviation of a call from the calls of the same session. Measured by bench_clocks: 2% to
5% for calls of 1 to 20 ms. Recorded: 3.4%."""

DISTURBED_SHARE: Final = 0.06
"""The share of calls that another process disturbs. Recorded: one call in twenty is 27% longer
or more."""

DISTURBED_FACTOR: Final = 0.5
"""How much longer such a call takes, on average (exponential). Assumed."""

# ------------------------------------------------------------------------------------- errors

ROUNDING_ERROR: Final[Mapping[Format, float]] = {
    Format.BF16: 2.0**-9 / 3**0.5,
    Format.FP16: 2.0**-12 / 3**0.5,
    Format.INT8: 2.0**-6 / 12**0.5,
}
"""The relative output error of a typical rounding: that of a number halfway between powers of
two; for int8 a step of 1/64 of the numbers' deviation, as the largest is some 4 of them
away."""

SENSITIVITY_DEVIATION: Final = 1.2
"""The deviation of squared errors of single roundings within a net. Assumed: the largest of
100 is then 20 times the median."""

OUTLIER_SHARE: Final = 0.02
"""The share of units whose roundings are far worse: few ops of huge sensitivity."""

OUTLIER_FACTOR: Final = (20.0, 2000.0)
"""How many times as large their squared errors are (evenly in the logarithm). Assumed;
judge's cancelling products lose 10 to 30 dB."""

WEIGHT_SHARE: Final = 0.3
"""The squared error of a unit's constants, beside that of its values. sensitivity.py: weights
mostly bring little beside values."""

ERROR_DIMENSIONS: Final = 48
"""Dimensions of the error vector: a rounding adds a vector, whose squared length is its own
error, and pairs interact by the angle between theirs. With fewer dimensions the best plan
would be one in which errors cancel by chance, which no net has that was looked at."""

ERROR_DECAY: Final = 0.95
"""The variance of each dimension over that of the one before."""

COMMON_DIRECTION: Final = 0.6
"""What the roundings of one unit have in common: several readers read the same error."""

ERROR_BEND: Final = 0.15
"""The deviation of the exponent by which many errors are more or less than their sum.
Together with the angles squared errors of plans are then 2 dB from their sums on average, and
up to 5, as search.md has it."""

DECISIONS_APART: Final = 0.3
DECISIONS_APART_IN_DETECTORS: Final = 0.8
"""The deviation of what a rounding does to decisions, over what it does to the output's
error. search.md: a detector's errors are the boxes', its decisions hang on scores. Sizes
assumed; of whole plans .065 was recorded, as those of many roundings are alike."""

HINT_ERROR: Final = 0.8
"""The error of a plan by the hint over that of the same plan by casts, in the middle: under
its hint an engine leaves some products unrounded (native/hint.py). The size is assumed."""

# ------------------------------------------------------------------------------------ the hint

HINT_TIME: Final = 0.97
"""True time of kernels under the engine's hint over that of the same ops between casts.
Measured by RESULTS-hint.md: 0.97 to 1.06, casts apart."""

HINT_CASTS: Final = 0.25
"""What is left of the time of casts under the hint: reorders. Assumed."""

HINT_SHARE: Final = 0.85
"""Share of drawn nets whose engine has a hint; the others are of ONNX Runtime or PyTorch."""

STATES_BY_HINT: Final = 0.3
"""Share of those whose plans can be written by the hint (IR), too. Assumed."""

INT8_SHARE: Final = 0.25
"""Share of drawn nets with int8 beside bf16. Assumed."""

# --------------------------------------------------------------------------- data and metrics

POPULATION: Final = 6000
"""Samples on which the true loss of a plan is counted. Its standard error is a fifth to a
tenth of that of the samples that a search sees."""

SAMPLES: Final = (120, 600)
"""Samples that a search sees. As the peers' nets and search.md have it."""

CALIBRATION: Final = 128
"""Samples for errors (data/workload.py, ``MOST_PROBED_ROWS``)."""

TIMED_ROWS: Final = 16
"""Samples of the call that is timed, and whose output error each evaluation measures."""

CALL_ROWS: Final = (1, 4, 8, 16)
"""Samples of a call. Assumed, so that calls take 0.3 to 30 ms."""

SPREAD_OF_SAMPLES: Final = 0.5
"""The deviation of the error's size from sample to sample. Recorded of 1,440 samples."""

ACCURACY: Final = (0.60, 0.98)
"""Accuracy of the fp32 model."""

RIGHT_AT_BORDER: Final = (0.50, 0.36)
"""Of decisions without a margin: the share that is right, and the share of which the second
choice is. Assumed; where both are nearly equal much changes and little is lost
(ResNet-20)."""

TOLERANCES: Final = (0.003, 0.005, 0.01, 0.01, 0.01, 0.02, 0.03)
"""Losses that users allow, relative; 0.01 is the default."""

DIFFICULTY: Final = (0.25, 25.0)
"""What all ops in the lowest format lose over what may be lost (evenly in the logarithm).
Assumed, so that in one net of three all may be low; of the peers' 14 nets it is 4."""

METRICS: Final[Mapping[str, float]] = {
    "accuracy": 0.6,
    "agreement": 0.15,
    "snr_db": 0.12,
    "cosine": 0.13,
}
"""Metrics of drawn nets, with their shares."""

# --------------------------------------------------------------------------- simulated seconds

START_S: Final = 2.0
"""Imports and the reading of a model. tune.py: to import libraries takes seconds, once."""

COMPILE_S: Final = 0.05
COMPILE_OP_S: Final = 1.7e-3
"""To compile a model: at all, and for each op. Recorded of the largest models of 22 searches
in OpenVINO; ONNX Runtime takes .5 ms an op."""

BUILD_OP_S: Final = 5e-4
"""To make a plan's model, for each op. Measured: a 12-layer BERT (600 ops) converts in 0.3
s."""

SAMPLE_OVERHEAD: Final = 1.3
"""Seconds of an evaluation over those that its samples compute: decoding and the metric."""

PROBE_SLOWDOWN: Final = 3.0
"""A run with switched roundings over a run of the model. roundings.py: several times."""

PROBED_ROWS: Final = 8
PROBED_IN_ALL: Final = 80 * PROBED_ROWS
"""Samples of each probe of many roundings, and samples times roundings (data/workload.py)."""

PROBE_PARTS: Final = 4
"""Sessions that are compiled for the probes of one format: switches are split into parts."""

PROFILE_RUNS: Final = 30
"""Runs of each model that is profiled (native/profiles.py)."""

OBSERVE_SLOWDOWN: Final = 4.0
"""Runs that show all values, over those of the model. Assumed."""

EMULATION_SLOWDOWN: Final = 3.0
"""A plan's roundings emulated on calibration data, without a compilation; as of a probe."""

# ----------------------------------------------------------------- rules, engines, judge nets

KEPT_BY_RULES: Final = 0.04
"""Share of ops other than products that the rules keep in fp32. Assumed."""

UNROUNDED_PRODUCTS: Final = 0.2
"""Share of products whose results an engine leaves unrounded under its hint. Assumed."""

FUSED_TRAFFIC: Final = 0.3
"""Memory traffic of an op that is fused, over that of one that is not. Assumed."""

TIME_SCALE: Final = 300.0
"""Times of the judge's made-up device are so many times as long in the lab, so that a call
takes milliseconds."""

JUDGE_METRIC_NOISE: Final = 0.08
"""The deviation of a squared error on the data that a search sees from the enumerated one.
search.md's measured nets: 64 samples give an error that is 7% off."""

JUDGE_ROWS: Final = 32
"""Calibration rows of an enumerated net: all of its input's rows."""

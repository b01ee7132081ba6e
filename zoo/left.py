"""What of the figures is not as it should be, and why: written by hand, for the report."""

from __future__ import annotations

from typing import Final

LEFT: Final = """## What is left

Where three figures are given, they are of three random nets of the architecture.

- **mixer, whisper and detr, compiled**: their gradients are NaN under autocast, without
  finecast, too, where they are not op by op: Inductor 2.13 builds a kernel that stores a
  gradient in bf16 transposed, behind a norm's backward pass, and leaves numbers unset (found
  in mixer's). In fp32 it is right.
- **unet2d_condition, compiled**: gradients are 41% off under autocast, without finecast, and
  so they are in fp32, which is what `auto` plans here; op by op bf16 gives 1.3%. vae's are 85%
  off in bf16, autocast's and finecast's, and right in fp32. Both are Inductor's; which kernels
  it is was not looked into.
- **mixtral, compiled**: for one of three inputs a token goes to another expert than in fp32,
  its two experts being nearly equal; for the others `all` has 1.3 times autocast's error.
- **`auto`**: on this machine (no AMX, and busy) PyTorch's bf16 was measured to be slower than
  fp32, so `auto` plans fp32 throughout. Its errors are those of fp32, and what it saves for
  the backward pass is fp32's: more than autocast's in resnet, vit and llama. Given rates that
  were made up, of a bf16 16 times faster, and run op by op, `auto` has 0.89, 1.01 and 0.93
  times autocast's error of gradients in vit, resnet and bert, and the forward pass saves 0.88,
  1.19 and 0.31 MB beside autocast's 1.02, 10.28 and 0.31.
- **MB of `all`** in graph_net, llama and resnet: 1.10, 1.13 and 1.01 times autocast's. What
  their forward passes save is no more than autocast's (24 KB beside 25, 418 KB both, 10.3 MB
  both); llama's logits are fp32, as the module gives them, where autocast gives bf16. The rest
  is the peak of temporaries, which the order of the kernels decides; it was not looked into.
- **MB of `auto`, where bf16 pays**: 1.05 times autocast's in dit, where it saves sums in fp32
  that autocast computes again, and 1.04 in deberta_v2, whose masked softmax keeps fp32.
- **Gradients of `auto`, where bf16 pays**: t5 has 1.14 times autocast's error (1.08 and 1.22
  with other weights); it is not the sums of gradients, which are fp32 in both. segformer's
  1.31 is 1.01 with other weights.
- **Gradients of `all`** are above autocast's, which no bar forbids: `all` rounds those of
  norms and residuals as well. bart's are 12 times autocast's (op by op, not compiled): 98% of
  their norm are the embeddings', which hardly see a rounding under autocast. The median over
  its parameters is 1.7.
- **maxvit, bf16 in OpenVINO**: 1.6 times the hint's over eight inputs. The hint keeps
  constants of pointwise ops in fp32, inside of low kernels; a model states them low. densenet
  has 1.2 by the same (`benchmarks/RESULTS-hint.md`).
- **beit, bf16 in OpenVINO**: 0.0023, as under autocast, where the hint has 2e-05: the hint
  gives the last product's result unrounded, which no model can state. With that product in
  fp32 the error is 0.93 of the hint's.
- **Exports with open shapes**: OpenVINO 2026.4 rounds half of what a cast to bf16 should round
  up down. What products read is rounded before its cast; of what others read the figures for
  bf16 contain it. With fixed shapes they are right."""

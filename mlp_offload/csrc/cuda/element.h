// fp32 arithmetic on the device with the CPU kernel's bits, and elements of any dtype from and to memory.
#pragma once

#include "cuda/batch.h"

#define ADAM_TARGET __device__
#include "adam/update_body.h"
// Needs what update_body.h defines.
#include "adam/one_element.h"

namespace mlp_offload::cuda {
namespace {

using adam::Bf16;
using adam::Fp16;
using adam::kBf16;
using adam::kFp16;
using adam::kFp32;

// Intrinsics that are rounded once, to nearest even, and never fused with a neighbour.
struct Rounded : adam::OneElement {
  ADAM_INLINE float add(float a, float b) { return __fadd_rn(a, b); }
  ADAM_INLINE float sub(float a, float b) { return __fsub_rn(a, b); }
  ADAM_INLINE float mul(float a, float b) { return __fmul_rn(a, b); }
  ADAM_INLINE float div(float a, float b) { return __fdiv_rn(a, b); }
  ADAM_INLINE float sqrt(float a) { return __fsqrt_rn(a); }
  ADAM_INLINE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
};

template <class T>
__device__ inline void load_widened(float (&to)[4], const T* from, int count) {
  T raw[4] = {};
  load(raw, from, count);
  for (int i = 0; i != 4; ++i) to[i] = Rounded::load(raw + i);
}

template <class T>
__device__ inline void store_rounded(T* to, const float (&from)[4], int count) {
  T raw[4];
  for (int i = 0; i != 4; ++i) Rounded::store(raw + i, from[i]);
  store(to, raw, count);
}

// `dtype` is the same for a whole row, so no thread waits for another at these branches.
__device__ inline void load_as(int dtype, float (&to)[4], const void* from, std::int64_t first, int count) {
  if (dtype == kFp32) load_widened(to, static_cast<const float*>(from) + first, count);
  if (dtype == kBf16) load_widened(to, static_cast<const Bf16*>(from) + first, count);
  if (dtype == kFp16) load_widened(to, static_cast<const Fp16*>(from) + first, count);
}

__device__ inline void store_as(int dtype, void* to, const float (&from)[4], std::int64_t first, int count) {
  if (dtype == kFp32) store_rounded(static_cast<float*>(to) + first, from, count);
  if (dtype == kBf16) store_rounded(static_cast<Bf16*>(to) + first, from, count);
  if (dtype == kFp16) store_rounded(static_cast<Fp16*>(to) + first, from, count);
}

}  // namespace
}  // namespace mlp_offload::cuda

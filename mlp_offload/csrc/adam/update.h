// One AdamW step over a run of elements: the types, and the table of functions that each variant fills.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlp_offload::adam {

// Storage of a 16-bit float; arithmetic happens in fp32 only.
struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

// [Note: remainder] A bf16 weight is the upper half of its fp32 master, rounded to nearest even. Beside the weight, the
// master is known from its lower half (16 bits, the remainder) and one bit that says whether the weight was rounded up.
// That bit lives in the sign of exp_avg_sq, which is never negative. Ten bytes a parameter hold what twelve did, exactly:
//   master = ((weight << 16) - (rounded up) << 16) | remainder
// A NaN stays a NaN, with another payload.
struct Remainder {
  std::uint16_t bits;
};

// Codes that cross the language boundary (mlp_offload/adam/kernel.py).
constexpr std::int64_t kFp32 = 0, kBf16 = 1, kFp16 = 2, kDtypeCount = 3;

// What one parameter group contributes, each value rounded to fp32 once by the caller. A factor that does not apply
// is 1.0f: multiplying by it changes no bits.
struct Scalars {
  float decay;                  // 1 - lr * weight_decay
  float one_minus_beta1;        //
  float beta2;                  //
  float one_minus_beta2;        //
  float eps;                    //
  float step_size;              // lr / (1 - beta1^step)
  float bias_correction2_sqrt;  // sqrt(1 - beta2^step)
  float inverse_scale;          // 1 / loss scale
  float clip_coefficient;       //
};
constexpr int kScalarCount = 9;
static_assert(sizeof(Scalars) == kScalarCount * sizeof(float), "a row of the groups array is read as one Scalars");

// A run of elements with one gradient, one weight and one set of scalars. `weight` null: no weight is written.
// `main_param` points to float, or to Remainder; then `weight` is read as well, and exp_avg_sq carries the sign bit.
struct Run {
  void* main_param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* weight;
  std::size_t numel;
};

using UpdateFunction = void (*)(const Run&, const Scalars&);

// Sum of words[i] * (2 * (first + i) + 1) modulo 2^32: the factors are odd, so a single changed word always shows; sums
// of parts add up to that of the whole.
using SumFunction = std::uint32_t (*)(const std::uint16_t* words, std::size_t count, std::size_t first);

struct UpdateTable {
  UpdateFunction update[kDtypeCount][kDtypeCount + 1];  // by dtypes of gradient and weight; the last writes no weight
  UpdateFunction update_remainder[kDtypeCount];         // by dtype of gradient; main_param is Remainder, weight bf16
  SumFunction sum_words;
};

const UpdateTable& scalar_table();
#if defined(__x86_64__)
const UpdateTable& avx2_table();
const UpdateTable& avx512_table();
#endif

}  // namespace mlp_offload::adam

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
struct Run {
  float* main_param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* weight;
  std::size_t numel;
};

using UpdateFunction = void (*)(const Run&, const Scalars&);

// Indexed by the dtypes of gradient and weight; the last weight column writes no weight.
struct UpdateTable {
  UpdateFunction update[kDtypeCount][kDtypeCount + 1];
};

const UpdateTable& scalar_table();
#if defined(__x86_64__)
const UpdateTable& avx2_table();
const UpdateTable& avx512_table();
#endif

}  // namespace mlp_offload::adam

// The portable variant: one element at a time. Runs everywhere.
#include <cmath>

#define ADAM_TARGET
#include "adam/update_body.h"
// Needs what update_body.h defines.
#include "adam/one_element.h"

namespace mlp_offload::adam {
namespace {

struct Scalar : OneElement {
  ADAM_INLINE float add(float a, float b) { return a + b; }
  ADAM_INLINE float sub(float a, float b) { return a - b; }
  ADAM_INLINE float mul(float a, float b) { return a * b; }
  ADAM_INLINE float div(float a, float b) { return a / b; }
  ADAM_INLINE float sqrt(float a) { return std::sqrt(a); }
  ADAM_INLINE float fma(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

const UpdateTable& scalar_table() {
  static constexpr UpdateTable table = make_table<Scalar>();
  return table;
}

}  // namespace mlp_offload::adam

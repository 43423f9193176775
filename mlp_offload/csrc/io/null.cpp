// The engine that moves nothing: every request is done when submit returns. No file is opened.
#include "io/engine.h"

namespace mlp_offload::io {
namespace {

class NullCore final : public Core {
 public:
  using Core::Core;

  unsigned thread_count() const override { return 0; }
  void run() override {}
  void enqueue(const RequestPtr& request) override {
    Core::enqueue(request);
    Block block;
    while (try_block(block)) finish(block);
  }
};

}  // namespace

std::shared_ptr<Core> make_null(const Settings& settings) { return std::make_shared<NullCore>(settings, Fd()); }

}  // namespace mlp_offload::io

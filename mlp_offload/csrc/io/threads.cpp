// The reference engine: a pool of threads, each of which moves one block at a time with pread or pwrite.
#include <unistd.h>

#include <cerrno>

#include "io/engine.h"

namespace mlp_offload::io {
namespace {

class ThreadsCore final : public Core {
 public:
  using Core::Core;

  unsigned thread_count() const override { return settings.threads; }

  void run() override {
    for (Block block; wait_for_block(block);) {
      before_transfer(block);
      while (after_call(block, call(block)) == Next::again) {
      }
      finish(block);
    }
  }

 private:
  int64_t call(const Block& block) const {
    const auto offset = static_cast<off_t>(block.left_offset());
    const ssize_t moved = block.request->operation == Operation::read
                              ? pread(file(), block.left_address(), block.left_nbytes(), offset)
                              : pwrite(file(), block.left_address(), block.left_nbytes(), offset);
    return moved < 0 ? -errno : moved;
  }
};

}  // namespace

std::shared_ptr<Core> make_threads(const Settings& settings) {
  return std::make_shared<ThreadsCore>(settings, open_file(settings));
}

}  // namespace mlp_offload::io

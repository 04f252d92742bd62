#include "jax/fused_call.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "named/cut.h"

namespace farandole {
namespace {

constexpr CutLimits kLimits{
    .together = 4 << 20,  // the pack before is reduced while the next one is filled
    .alone = 128 << 10,   // as operations by name have it
};
// How often the launching thread looks by itself: most of what is small ends within a few
// microseconds, and waking another thread costs more than that.
constexpr int kLooks = 200;
constexpr size_t kQuickBytes = 16 << 10;

CutItem cut_item(const JaxCall& call, const Member& member) {
  return {
      .set = 0, .spec = call.options, .dtype = member.input.dtype, .bytes = member.input.bytes()};
}

}  // namespace

FusedCall::FusedCall(std::shared_ptr<Group> group, JaxCall call)
    : group_(std::move(group)), call_(std::move(call)) {
  for (const Member& m : call_.members)
    checked_shape(m.input, m.output, call_.options, group_->rank(), group_->size());
  if (!call_.members.empty())
    call_.options.bundle = bundle_of(call_.options.name, call_.options.kind, call_.members);
  plan();
}

/// Which arrays travel together: by what all ranks share, their order, dtypes and sizes.
void FusedCall::plan() {
  if (call_.members.empty()) packs_.emplace_back();  // a barrier
  std::vector<CutItem> items;
  for (const Member& member : call_.members) items.push_back(cut_item(call_, member));
  for (std::vector<size_t>& members : cut(items, kLimits)) {
    Pack pack{std::move(members), nullptr, 0, {}};
    for (const size_t i : pack.members) pack.bytes += items[i].bytes;
    packs_.push_back(std::move(pack));
  }
}

Options FusedCall::options_of(const Pack& pack) const {
  Options options = call_.options;
  if (call_.members.size() < 2) return options;
  options.name += "[" + std::to_string(pack.members.front());
  if (pack.members.size() > 1) options.name += " … " + std::to_string(pack.members.back());
  options.name += ']';
  return options;
}

/// Copies the pack's inputs together.
Buffer FusedCall::fill(Pack& pack, BufferPool& pool) const {
  const DType dtype = call_.members[pack.members.front()].input.dtype;
  pack.memory = pool.borrow(pack.bytes);
  std::byte* at = pack.memory.get();
  for (const size_t i : pack.members) {
    const Buffer& input = call_.members[i].input;
    copy_bytes(at, input.data, input.bytes());
    at += input.bytes();
  }
  return {pack.memory.get(), pack.bytes / size_of(dtype), dtype};
}

void FusedCall::launch(const std::shared_ptr<Stream>& stream, BufferPool& pool) {
  for (Pack& pack : packs_) {
    try {
      submit(pack, stream, pool);
    } catch (const Error& error) {  // what is under way already ends first
      group_->abort(error);         // nobody waits for what this rank will not send
      if (!error_) error_ = error;
    }
  }
}

void FusedCall::submit(Pack& pack, const std::shared_ptr<Stream>& stream, BufferPool& pool) {
  Member member;
  if (pack.members.size() == 1) member = call_.members[pack.members.front()];
  if (pack.members.size() > 1) member.input = member.output = fill(pack, pool);
  const bool quick = packs_.size() == 1 && pack.bytes <= kQuickBytes;
  pack.handle =
      group_->begin_on(stream, member.input, member.output, options_of(pack), quick ? kLooks : 0);
}

bool FusedCall::is_over() const {
  return std::ranges::all_of(packs_, [](const Pack& pack) { return pack.handle.done(); });
}

std::optional<Error> FusedCall::finish() {
  for (const Pack& pack :
       packs_) {  // all of them: what is under way writes into the program's memory
    try {
      pack.handle.wait();
    } catch (const Error& error) {
      if (!error_) error_ = error;
    }
  }
  if (error_) return error_;
  for (const Pack& pack : packs_)
    if (pack.memory) unpack(pack);
  return std::nullopt;
}

void FusedCall::unpack(const Pack& pack) const {
  const std::byte* at = pack.memory.get();
  for (const size_t i : pack.members) {
    const Buffer& output = call_.members[i].output;
    copy_bytes(output.data, at, output.bytes());
    at += output.bytes();
  }
}

}  // namespace farandole

#include "group/grouped.h"

#include <algorithm>
#include <string>

#include "base/copy.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

// An operation costs about what copying this much twice does.
constexpr size_t kSmall = 32 << 10;
constexpr size_t kMostPacked = 1 << 20;  // bytes of a pack's input or output

bool in_place(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast;
}

}  // namespace

std::shared_ptr<Bundle> bundle_of(const std::string& name, Collective kind,
                                  std::span<const Member> members) {
  if (members.size() == 1) return nullptr;
  std::vector<BundledArray> arrays;
  arrays.reserve(members.size());
  for (const Member& m : members) arrays.push_back({m.input.count, 0, 0, m.input.dtype, kind});
  return std::make_shared<Bundle>(name, std::move(arrays));
}

bool Grouped::has(Collective kind) {
  return in_place(kind) || kind == Collective::reduce_scatter || kind == Collective::all_gather;
}

Grouped::Grouped(Group& group, std::vector<Member> members, const Options& options,
                 bool caller_waits)
    : kind_(options.kind), rank_(group.rank()), size_(group.size()), members_(std::move(members)) {
  for (const Member& m : members_) checked_shape(m.input, m.output, options, rank_, size_);
  Options each = options;
  each.bundle = bundle_of(options.name, kind_, members_);
  packs_ = plan(group);
  std::vector<bool> packed(members_.size());
  std::vector<Group::Item> items;
  for (const Pack& pack : packs_) {
    for (const size_t i : pack.members) packed[i] = true;
    items.push_back(fill(pack, each));
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    if (packed[i]) continue;
    items.push_back({members_[i].input, members_[i].output, each});
    if (members_.size() > 1) items.back().options.name += "[" + std::to_string(i) + "]";
  }
  if (members_.empty()) items.push_back({{}, {}, each});  // compared with what others give
  handles_ = group.submit_all(std::move(items), caller_waits);
}

Shape Grouped::shape_of(const Member& member) const {
  Shape shape;
  shape.rank = rank_;
  shape.size = size_;
  shape.count = member.input.count;
  return shape;
}

/// Which arrays travel together: by what all ranks share, their order, dtypes and sizes.
std::vector<Grouped::Pack> Grouped::plan(Group& group) const {
  std::vector<Pack> packs;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& m = members_[i];
    // The parts of a reduce_scatter differ by one between ranks: the input alone decides.
    const size_t element = size_of(m.input.dtype);
    const size_t widest =
        m.input.bytes() *
        (kind_ == Collective::all_gather ? static_cast<size_t>(size_) : size_t{1});
    if (widest > kSmall) continue;
    auto pack = std::ranges::find_if(packs, [&](const Pack& p) {
      const size_t have = std::max(p.input, kind_ == Collective::all_gather ? p.output : 0);
      return p.dtype == m.input.dtype && have * element + widest <= kMostPacked;
    });
    if (pack == packs.end()) pack = packs.insert(pack, Pack{m.input.dtype, {}, 0, 0, {}, {}});
    pack->members.push_back(i);
    pack->input += m.input.count;
    pack->output += m.output.count;
  }
  std::erase_if(packs, [](const Pack& p) { return p.members.size() < 2; });
  for (Pack& p : packs) {
    const size_t element = size_of(p.dtype);
    p.sent = group.borrow(p.input * element);
    p.arrived = in_place(kind_) ? p.sent : group.borrow(p.output * element);
  }
  return packs;
}

/// Copies the pack's inputs together. A reduce_scatter's lie by owner, so that each rank's parts of
/// all of them are one part of the whole.
Group::Item Grouped::fill(const Pack& pack, const Options& options) const {
  const size_t element = size_of(pack.dtype);
  Group::Item item{{pack.sent.get(), pack.input, pack.dtype},
                   {pack.arrived.get(), pack.output, pack.dtype},
                   options};
  item.options.name += "[" + std::to_string(pack.members.front()) + " … " +
                       std::to_string(pack.members.back()) + "]";
  std::byte* at = pack.sent.get();
  const int owners = kind_ == Collective::reduce_scatter ? size_ : 1;
  for (int r = 0; r < owners; ++r) {
    size_t count = 0;
    for (const size_t i : pack.members) {
      const Buffer& input = members_[i].input;
      const Slice s = owners == 1 ? Slice{Space::input, 0, input.count}
                                  : share_of(kind_, shape_of(members_[i]), r);
      copy_bytes(at, input.data + s.offset * element, s.count * element);
      at += s.count * element;
      count += s.count;
    }
    if (owners > 1) item.options.counts.push_back(count);
  }
  return item;
}

/// Copies the pack's results to their outputs; an all_gather's lie by owner.
void Grouped::place(const Pack& pack) const {
  const std::byte* at = pack.arrived.get();
  const int owners = kind_ == Collective::all_gather ? size_ : 1;
  for (int r = 0; r < owners; ++r)
    for (const size_t i : pack.members) {
      const Buffer& output = members_[i].output;
      const size_t bytes = output.bytes() / static_cast<size_t>(owners);
      copy_bytes(output.data + static_cast<size_t>(r) * bytes, at, bytes);
      at += bytes;
    }
}

bool Grouped::done() const {
  return std::ranges::all_of(handles_, [](const Handle& h) { return h.done(); });
}

bool Grouped::wait(Deadline until) {
  // All first: what is still under way would write into memory that its owner has taken back.
  const Error* first = nullptr;
  for (const Handle& h : handles_) {
    try {
      if (!h.wait(until)) return false;
    } catch (const Error&) {
      if (first == nullptr) first = h.error();
    }
  }
  if (first != nullptr) throw Error(*first);
  if (!placed_)
    for (const Pack& pack : packs_) place(pack);
  placed_ = true;
  return true;
}

}  // namespace farandole

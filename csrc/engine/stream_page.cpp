#include "engine/stream_page.h"

#include <bit>
#include <cstdio>
#include <functional>
#include <map>
#include <span>
#include <sstream>

#include "base/fixed_text.h"

namespace farandole {
namespace {

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

/// The fields in the order in which a difference is reported.
struct Field {
  std::string_view name;
  std::string (*value)(const Descriptor&);
};
constexpr Field kFields[] = {
    {"operation", [](const Descriptor& d) { return std::string(name_of(d.kind)); }},
    {"dtype", [](const Descriptor& d) { return std::string(name_of(d.dtype)); }},
    {"counts", [](const Descriptor& d) { return text_in(d.counts); }},
    {"count", [](const Descriptor& d) { return std::to_string(d.count); }},
    {"op", [](const Descriptor& d) { return std::string(name_of(d.op)); }},
    {"root", [](const Descriptor& d) { return std::to_string(d.root); }},
    {"prescale", [](const Descriptor& d) { return number(d.prescale); }},
    {"postscale", [](const Descriptor& d) { return number(d.postscale); }},
    {"level", [](const Descriptor& d) { return std::string(name_of(d.level)); }},
    {"algorithm", [](const Descriptor& d) { return text_in(d.algorithm); }},
    {"name", [](const Descriptor& d) { return text_in(d.name); }},
};

std::string first_name(const std::vector<Descriptor>& by_rank) {
  for (const Descriptor& d : by_rank)
    if (d.name[0] != 0) return text_in(d.name);
  return "";
}

/// Multiplies and folds, word by word.
class Hash {
 public:
  void add(uint64_t word) { value_ = (std::rotl(value_, 23) ^ word) * 0xff51afd7ed558ccd; }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(std::string_view text) {
    add(text.size());
    for (; !text.empty(); text.remove_prefix(std::min(text.size(), sizeof(uint64_t)))) {
      uint64_t word = 0;
      std::memcpy(&word, text.data(), std::min(text.size(), sizeof word));
      add(word);
    }
  }
  void add(std::span<const size_t> counts) {
    add(counts.size());
    for (const size_t n : counts) add(n);
  }
  uint64_t value() const { return value_ ^ value_ >> 32; }

 private:
  uint64_t value_ = 0x9e3779b97f4a7c15;
};

uint64_t hash_of(std::span<const size_t> counts) {
  Hash hash;
  hash.add(counts);
  return hash.value();
}

/// send and recv are two ends of one operation.
Collective common_name(Collective kind) {
  return kind == Collective::recv ? Collective::send : kind;
}

/// "3, 0, 5"; what does not fit into `most` characters is cut, and the hash of all stands instead.
std::string text_of(std::span<const size_t> counts, size_t most) {
  std::string text;
  for (const size_t n : counts) {
    if (!text.empty()) text += ", ";
    text += std::to_string(n);
    if (text.size() >= most) break;
  }
  if (text.size() < most) return text;
  char rest[40];
  std::snprintf(rest, sizeof rest, ", … (hash %016llx)",
                static_cast<unsigned long long>(hash_of(counts)));
  text.resize(text.rfind(", ", most - sizeof rest));
  return text + rest;
}

}  // namespace

Descriptor describe(const Operation& o) {
  Descriptor d;
  std::memset(static_cast<void*>(&d), 0, sizeof d);  // texts are short, and all of it is shared
  d.kind = common_name(o.kind);
  d.dtype = o.input.dtype;
  d.op = o.op;
  d.level = o.level;
  d.root = o.root;
  d.count = o.count;
  d.prescale = o.prescale;
  d.postscale = o.postscale;
  copy_cut(o.algorithm, d.algorithm);
  copy_cut(o.name, d.name);
  if (!o.counts.empty()) copy_cut(text_of(o.counts, sizeof d.counts), d.counts);
  return d;
}

uint32_t hash_of(const Operation& o) {
  Hash h;
  h.add(static_cast<uint64_t>(common_name(o.kind)) | static_cast<uint64_t>(o.input.dtype) << 8 |
        static_cast<uint64_t>(o.op) << 16 | static_cast<uint64_t>(o.level) << 24 |
        static_cast<uint64_t>(static_cast<uint32_t>(o.root)) << 32);
  h.add(o.count);
  h.add(o.prescale);
  h.add(o.postscale);
  h.add(cut(o.algorithm, sizeof Descriptor::algorithm));  // no more than others can be shown
  h.add(cut(o.name, sizeof Descriptor::name));
  h.add(std::span(o.counts));
  const auto hash = static_cast<uint32_t>(h.value());
  return hash != 0 ? hash : 1;  // a line never used bears the flag 0, which is a number after 2^32
}

Posts compare_posts(const StreamMemory& memory) {
  bool all = true;
  for (int r = 0; r < memory.size(); ++r) {
    const uint64_t posted = memory.page(r).entry.posted.load(std::memory_order_acquire);
    const auto ahead =
        static_cast<int32_t>(static_cast<uint32_t>(posted >> 32) - memory.sequence());
    if (ahead < 0) all = false;
    // A peer that is ahead has compared my descriptor with its own and found them equal.
    if (ahead == 0 && posted != memory.ticket) return Posts::different;
  }
  return all ? Posts::same : Posts::waiting;
}

std::optional<Error> disagreement(const std::vector<Descriptor>& by_member,
                                  const std::vector<int>& members) {
  for (const Field& field : kFields) {
    std::map<std::string, std::vector<int>> givers;
    for (size_t r = 0; r < by_member.size(); ++r)
      givers[field.value(by_member[r])].push_back(members[r]);
    if (givers.size() < 2) continue;
    Context where;
    where.field = field.name;
    where.operation = name_of(by_member.front().kind);
    where.tensor = first_name(by_member);
    std::string verdict = "ranks disagree on the " + std::string(field.name);
    if (field.name != "operation") verdict += " of " + where.operation;
    if (!where.tensor.empty()) verdict += " '" + where.tensor + "'";
    std::string list;
    for (auto& [value, ranks] : givers) {
      list += list.empty() ? ": " : "; ";
      list += (value.empty() ? std::string("none") : value) +
              (ranks.size() == 1 ? " on rank " : " on ranks ") + describe_ranks(ranks);
      where.values.emplace_back(value, std::move(ranks));
    }
    where.evidence = "descriptors of all ranks were compared before any data moved";
    return Error(ErrorCode::mismatch, verdict + list, std::move(where));
  }
  return std::nullopt;
}

}  // namespace farandole

// The layout of messages as a number, computed by the compiler from their lists of fields: another
// name, type, width, bound or order of a field is another number, and so is another order of an
// enumeration's values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/message.h"

namespace farandole {

/// The layout of all messages that ranks on several hosts send each other, in this build. Defined
/// where all of them are known (devices/messages.cpp).
uint64_t message_layouts();

// ---- names, as the compiler has them ----

/// The last word of what follows `marker`: of "Value = &farandole::Question::key]" it is "key".
constexpr std::string_view last_word(std::string_view text, std::string_view marker) {
  const size_t begin = text.find(marker) + marker.size();
  text = text.substr(begin, text.find_first_of(";]", begin) - begin);
  const auto in_word = [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  while (!text.empty() && !in_word(text.back())) text.remove_suffix(1);
  size_t first = text.size();
  while (first > 0 && in_word(text[first - 1])) --first;
  return text.substr(first);
}
template <auto Value>
constexpr std::string_view name_of_value() {
  return last_word(__PRETTY_FUNCTION__, "Value = ");
}
template <typename Type>
constexpr std::string_view name_of_type() {
  return last_word(__PRETTY_FUNCTION__, "Type = ");
}

// ---- the number ----

/// FNV-1a, which, unlike base/hash.h, is computed while the compiler runs, and for ever the same.
class LayoutHash {
 public:
  constexpr void add(uint64_t number) {
    for (int i = 0; i < 8; ++i) add_byte(static_cast<uint8_t>(number >> 8 * i));
  }
  constexpr void add(std::string_view text) {
    add(text.size());
    for (const char c : text) add_byte(static_cast<uint8_t>(c));
  }
  constexpr uint64_t value() const { return value_; }

 private:
  constexpr void add_byte(uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3; }

  uint64_t value_ = 0xcbf29ce484222325;
};

template <typename Enum, size_t... Values>
constexpr void add_names(LayoutHash& hash, std::index_sequence<Values...>) {
  (hash.add(name_of_value<static_cast<Enum>(Values)>()), ...);
}

/// The names of an enumeration's values up to the last one, in their order.
template <auto Last>
constexpr void add_enum(LayoutHash& hash) {
  add_names<decltype(Last)>(hash, std::make_index_sequence<static_cast<size_t>(Last) + 1>());
}

template <typename Message>
constexpr void add_message(LayoutHash& hash);

template <typename T, auto Limit>
constexpr void add_type(LayoutHash& hash) {
  if constexpr (is_message<T>) {
    add_message<T>(hash);
  } else if constexpr (std::is_enum_v<T>) {
    hash.add("enum");
    if constexpr (std::is_enum_v<decltype(Limit)>) add_enum<Limit>(hash);
  } else if constexpr (std::is_same_v<T, bool>) {
    hash.add("bool");
  } else if constexpr (std::is_arithmetic_v<T>) {
    hash.add(std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "signed" : "unsigned");
    hash.add(sizeof(T));
  } else if constexpr (std::is_array_v<T>) {
    hash.add("array");
    hash.add(std::extent_v<T>);
    add_type<std::remove_extent_t<T>, 0>(hash);
  } else if constexpr (is_optional_message<T>) {
    hash.add("optional");
    add_message<typename T::value_type>(hash);
  } else {
    hash.add(std::is_same_v<T, std::string> ? "text" : "list");
    hash.add(static_cast<uint64_t>(Limit));
    add_type<typename T::value_type, 0>(hash);
  }
}

template <typename Message>
constexpr void add_message(LayoutHash& hash) {
  hash.add("message");
  if constexpr (requires { Message::kTag; }) hash.add(static_cast<uint64_t>(Message::kTag));
  fields_of<Message>.for_each([&]<typename F>(F) {
    hash.add(name_of_value<F::kMember>());
    add_type<typename F::Type, F::kLimit>(hash);
  });
  hash.add("end");
}

template <typename... Messages>
constexpr uint64_t layouts_of() {
  LayoutHash hash;
  ((hash.add(name_of_type<Messages>()), add_message<Messages>(hash)), ...);
  return hash.value();
}

/// Whether the fields are all there is in such a struct, and lie in this order: of those that are
/// copied as they lie in memory.
template <typename Message>
constexpr bool are_all_fields_of() {
  size_t bytes = 0;
  fields_of<Message>.for_each([&]<typename F>(F) { bytes += sizeof(typename F::Type); });
  return bytes == sizeof(Message);
}

}  // namespace farandole
